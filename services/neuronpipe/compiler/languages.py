"""Sample sentences in languages other than English: the same six, in each of sixteen languages and eleven scripts.

Written for this project. They are about ordinary things and of very different lengths.
"""

from collections.abc import Mapping

SENTENCES: Mapping[str, tuple[str, ...]] = {
    "German": (
        "Das Paket kam zu spät an, und der Karton war beschädigt.",
        "Wo kann ich das Passwort meines Kontos ändern?",
        "Vielen Dank!",
        "Die Besprechung wurde auf Donnerstag um 9:30 Uhr verschoben.",
        "Im letzten Winter fror der Fluss zum ersten Mal seit vierzig Jahren zu, und die Kinder des Dorfes gingen über "
        "ihn zur Schule, bis "
        "das Eis zu dünn wurde.",
        "Das Museum, das 1902 gebaut wurde, besitzt eine Sammlung alter Karten, Werkzeuge und Briefe, die Besucher in "
        "einem ruhigen Raum "
        "im zweiten Stock lesen dürfen.",
    ),
    "French": (
        "Le colis est arrivé en retard et le carton était abîmé.",
        "Où puis-je changer le mot de passe de mon compte ?",
        "Merci beaucoup !",
        "La réunion a été déplacée à jeudi à 9 h 30.",
        "L'hiver dernier, la rivière a gelé pour la première fois depuis quarante ans, et les enfants du village l'ont "
        "traversée à pied "
        "pour aller à l'école jusqu'à ce que la glace devienne trop mince.",
        "Le musée, construit en 1902, possède une collection de vieilles cartes, d'outils et de lettres que les "
        "visiteurs peuvent lire "
        "dans une salle calme au deuxième étage.",
    ),
    "Spanish": (
        "El paquete llegó tarde y la caja estaba dañada.",
        "¿Dónde puedo cambiar la contraseña de mi cuenta?",
        "¡Muchas gracias!",
        "La reunión se ha aplazado al jueves a las 9:30.",
        "El invierno pasado el río se heló por primera vez en cuarenta años, y los niños del pueblo lo cruzaron a pie "
        "para ir a la escuela "
        "hasta que el hielo se volvió demasiado fino.",
        "El museo, construido en 1902, tiene una colección de mapas antiguos, herramientas y cartas que los visitantes "
        "pueden leer en una "
        "sala tranquila del segundo piso.",
    ),
    "Polish": (
        "Paczka przyszła za późno, a karton był uszkodzony.",
        "Gdzie mogę zmienić hasło do mojego konta?",
        "Dziękuję bardzo!",
        "Spotkanie przełożono na czwartek na 9:30.",
        "Zeszłej zimy rzeka zamarzła po raz pierwszy od czterdziestu lat, a dzieci ze wsi chodziły po niej do szkoły, "
        "dopóki lód nie stał "
        "się zbyt cienki.",
        "Muzeum, zbudowane w 1902 roku, ma zbiór starych map, narzędzi i listów, które zwiedzający mogą czytać w "
        "cichej sali na drugim "
        "piętrze.",
    ),
    "Turkish": (
        "Paket geç geldi ve kutu hasarlıydı.",
        "Hesabımın şifresini nereden değiştirebilirim?",
        "Çok teşekkür ederim!",
        "Toplantı perşembe günü saat 9.30'a alındı.",
        "Geçen kış nehir kırk yıldan beri ilk kez dondu ve köyün çocukları buz çok incelene kadar okula onun üzerinden "
        "yürüyerek gittiler.",
        "1902 yılında yapılan müzede, ziyaretçilerin ikinci kattaki sessiz bir odada okuyabileceği eski haritalar, "
        "aletler ve mektuplar "
        "bulunuyor.",
    ),
    "Vietnamese": (
        "Gói hàng đến muộn và chiếc hộp đã bị hỏng.",
        "Tôi có thể đổi mật khẩu tài khoản của mình ở đâu?",
        "Cảm ơn rất nhiều!",
        "Cuộc họp đã được dời sang thứ Năm lúc 9 giờ 30.",
        "Mùa đông năm ngoái, dòng sông đóng băng lần đầu tiên sau bốn mươi năm, và trẻ em trong làng đi bộ qua sông "
        "đến trường cho đến khi "
        "băng trở nên quá mỏng.",
        "Bảo tàng được xây dựng năm 1902 có một bộ sưu tập bản đồ cũ, dụng cụ và thư từ mà khách tham quan có thể đọc "
        "trong một căn phòng "
        "yên tĩnh trên tầng hai.",
    ),
    "Swahili": (
        "Kifurushi kilichelewa kufika na sanduku lilikuwa limeharibika.",
        "Ninaweza kubadilisha wapi nenosiri la akaunti yangu?",
        "Asante sana!",
        "Mkutano umehamishiwa siku ya Alhamisi saa 9:30.",
        "Majira ya baridi yaliyopita mto uliganda kwa mara ya kwanza baada ya miaka arobaini, na watoto wa kijiji "
        "walitembea juu yake "
        "kwenda shuleni hadi barafu ilipokuwa nyembamba sana.",
        "Jumba la makumbusho, lililojengwa mwaka 1902, lina mkusanyiko wa ramani za zamani, zana na barua ambazo "
        "wageni wanaweza kusoma "
        "katika chumba tulivu cha ghorofa ya pili.",
    ),
    "Russian": (
        "Посылка пришла с опозданием, и коробка была повреждена.",
        "Где я могу изменить пароль от своей учётной записи?",
        "Большое спасибо!",
        "Встречу перенесли на четверг, на 9:30.",
        "Прошлой зимой река замёрзла впервые за сорок лет, и дети из деревни ходили по ней в школу, пока лёд не стал "
        "слишком тонким.",
        "В музее, построенном в 1902 году, есть собрание старых карт, инструментов и писем, которые посетители могут "
        "читать в тихой "
        "комнате на втором этаже.",
    ),
    "Greek": (
        "Το δέμα έφτασε αργά και το κουτί ήταν κατεστραμμένο.",
        "Πού μπορώ να αλλάξω τον κωδικό του λογαριασμού μου;",
        "Ευχαριστώ πολύ!",
        "Η συνάντηση μεταφέρθηκε για την Πέμπτη στις 9:30.",
        "Τον περασμένο χειμώνα το ποτάμι πάγωσε για πρώτη φορά μετά από σαράντα χρόνια, και τα παιδιά του χωριού το "
        "περνούσαν με τα πόδια "
        "για να πάνε στο σχολείο, ώσπου ο πάγος έγινε πολύ λεπτός.",
        "Το μουσείο, που χτίστηκε το 1902, έχει μια συλλογή από παλιούς χάρτες, εργαλεία και επιστολές που οι "
        "επισκέπτες μπορούν να "
        "διαβάσουν σε μια ήσυχη αίθουσα στον δεύτερο όροφο.",
    ),
    "Arabic": (
        "وصل الطرد متأخرا وكان الصندوق تالفا.",
        "أين يمكنني تغيير كلمة مرور حسابي؟",
        "شكرا جزيلا!",
        "تم تأجيل الاجتماع إلى يوم الخميس الساعة 9:30.",
        "في الشتاء الماضي تجمد النهر لأول مرة منذ أربعين عاما، وكان أطفال القرية يعبرونه سيرا على الأقدام إلى المدرسة "
        "حتى أصبح الجليد "
        "رقيقا جدا.",
        "يضم المتحف الذي بني عام 1902 مجموعة من الخرائط القديمة والأدوات والرسائل التي يمكن للزوار قراءتها في غرفة "
        "هادئة في الطابق الثاني.",
    ),
    "Hebrew": (
        "החבילה הגיעה באיחור והקופסה הייתה פגומה.",
        "איפה אפשר לשנות את הסיסמה של החשבון שלי?",
        "תודה רבה!",
        "הפגישה נדחתה ליום חמישי בשעה 9:30.",
        "בחורף שעבר קפא הנהר בפעם הראשונה מזה ארבעים שנה, וילדי הכפר חצו אותו ברגל בדרך לבית הספר עד שהקרח "
        "נעשה דק מדי.",
        "במוזיאון, שנבנה בשנת 1902, יש אוסף של מפות ישנות, כלי עבודה ומכתבים שהמבקרים יכולים לקרוא בחדר שקט "
        "בקומה השנייה.",
    ),
    "Hindi": (
        "पार्सल देर से पहुँचा और डिब्बा टूटा हुआ था।",
        "मैं अपने खाते का पासवर्ड कहाँ बदल सकता हूँ?",
        "बहुत धन्यवाद!",
        "बैठक गुरुवार को सुबह 9:30 बजे के लिए टाल दी गई है।",
        "पिछली सर्दियों में नदी चालीस साल में पहली बार जम गई, और गाँव के बच्चे उस पर चलकर स्कूल जाते रहे जब तक बर्फ़ "
        "बहुत पतली नहीं हो गई।",
        "1902 में बने संग्रहालय में पुराने नक्शों, औज़ारों और पत्रों का संग्रह है, जिन्हें आगंतुक दूसरी मंज़िल के एक शांत कमरे में पढ़ सकते हैं।",
    ),
    "Thai": (
        "พัสดุมาถึงช้าและกล่องได้รับความเสียหาย",
        "ฉันจะเปลี่ยนรหัสผ่านของบัญชีได้ที่ไหน",
        "ขอบคุณมาก",
        "การประชุมถูกเลื่อนไปเป็นวันพฤหัสบดีเวลา 9:30 น.",
        "ฤดูหนาวที่แล้วแม่น้ำกลายเป็นน้ำแข็งเป็นครั้งแรกในรอบสี่สิบปี และเด็ก ๆ ในหมู่บ้านเดินข้ามไปโรงเรียนจนกระทั่งน้ำแข็งบางเกินไป",
        "พิพิธภัณฑ์ซึ่งสร้างขึ้นในปี 1902 มีคอลเลกชันแผนที่เก่า เครื่องมือ และจดหมายที่ผู้เข้าชมสามารถอ่านได้ในห้องเงียบ ๆ บนชั้นสอง",
    ),
    "Chinese": (
        "包裹到得很晚,而且箱子已经损坏了。",
        "我在哪里可以修改账户的密码?",
        "非常感谢!",
        "会议改到了星期四上午9:30。",
        "去年冬天,这条河四十年来第一次结冰,村里的孩子们一直从冰上走着去上学,直到冰变得太薄为止。",
        "这座建于1902年的博物馆收藏了许多旧地图、工具和信件,参观者可以在二楼一个安静的房间里阅读它们。",
    ),
    "Japanese": (
        "荷物の到着が遅れ、箱が壊れていました。",
        "アカウントのパスワードはどこで変更できますか?",
        "どうもありがとうございます!",
        "会議は木曜日の9時30分に変更されました。",
        "去年の冬、川が四十年ぶりに凍り、村の子どもたちは氷が薄くなりすぎるまで、その上を歩いて学校に通っていました。",
        "1902年に建てられたその博物館には古い地図や道具、手紙のコレクションがあり、来館者は二階の静かな部屋でそれらを読むことができます。",
    ),
    "Korean": (
        "소포가 늦게 도착했고 상자가 파손되어 있었습니다.",
        "제 계정의 비밀번호는 어디에서 바꿀 수 있나요?",
        "정말 감사합니다!",
        "회의가 목요일 9시 30분으로 변경되었습니다.",
        "지난겨울 강이 사십 년 만에 처음으로 얼었고, 마을 아이들은 얼음이 너무 얇아질 때까지 그 위를 걸어서 학교에 다녔습니다.",  # noqa: E501
        "1902년에 지어진 이 박물관에는 오래된 지도와 도구, 편지가 소장되어 있으며 방문객은 이층의 조용한 방에서 그것들을 읽을 수 있습니다.",  # noqa: E501
    ),
}
